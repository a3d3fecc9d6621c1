"""Every numeric tolerance of the tests, with its reason."""

# Largest logit difference to the float64 goldens in float32: their own float32 reference lies within 4e-6; another order
# of summation (chunks, cached steps, meshes) may add a few units in the last place of logits of about 4.
LOGITS_FLOAT32 = 2e-5
