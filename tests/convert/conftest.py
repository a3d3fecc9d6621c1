"""Verification runs PyTorch, so its tests exist where PyTorch is installed (extra `reference`)."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("torch") else ["test_verify.py"]
