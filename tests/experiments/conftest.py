"""The PyTorch reference is tested where PyTorch is installed (extra `reference`); elsewhere its tests do not exist."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("torch") else ["test_reference.py"]
