"""From logits to tokens, text and the reason to stop."""
