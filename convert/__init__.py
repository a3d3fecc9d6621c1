"""Weights between safetensors and Orbax."""
