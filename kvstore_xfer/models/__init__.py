"""What a model is: geometry, RoPE, weights and tokenizer digests, and whether it converts."""
