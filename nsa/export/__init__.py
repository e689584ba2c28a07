"""Hugging Face export (`nsa export`, to_hf.py) and import (`nsa import`, import_run.py)."""
