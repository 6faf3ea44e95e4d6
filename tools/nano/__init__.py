"""Builds inkling-nano: problems, tokenizer, training, evaluation, export. Not part of the installed package."""
