"""XNLI, cross-lingual natural language inference: its text, fine-tuning, and accuracy by"""
