"""Every numeric tolerance of the tests, with its reason."""

# Largest logit difference to the float64 goldens in float32: their own float32 reference lies within 4e-6; another
# order of summation (chunks, cached steps, meshes) may add a few units in the last place of logits of about 4.
LOGITS_FLOAT32 = 2e-5

# Error of a rotation by float32 angles at positions up to 4,096: half a unit in the last place of 4,096 radians
# (2.4e-4) times vectors of about 3.
ANGLES_FLOAT32 = 1e-3

# Relative error of one rounding to bfloat16's eight significant bits.
ROUNDED_BFLOAT16 = 2**-8

# Largest logit difference in bfloat16, relative to the largest logit: some ten roundings of 2^-9 that add up at random.
LOGITS_BFLOAT16 = 2e-2

# Relative difference between a gradient's norm and a central difference in float32: the loss is rounded to 2e-7 and
# moves by 6e-3 times the norm.
GRADIENT_DIFFERENCE = 2e-3

# Relative difference between two ways to sum a gradient in float32: some ten roundings of 6e-8 in sums that cancel.
GRADIENT_FLOAT32 = 1e-5
