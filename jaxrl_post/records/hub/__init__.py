"""Shares a saved model: its card, and its upload to the Hugging Face hub."""
