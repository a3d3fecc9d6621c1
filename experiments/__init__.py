"""Training, the PyTorch reference and benchmarks."""
