"""XNLI, cross-lingual natural language inference: text, fine-tuning, accuracy by language."""
