"""GPU kernels, each beside its plain-JAX meaning. There are none yet; the model runs on plain JAX everywhere."""
