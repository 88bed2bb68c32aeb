"""Hugging Face models in, trainable packed forwards, Hugging Face models out."""
