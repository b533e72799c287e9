"""Scaled dot-product attention: router -> checks -> seed -> sdpa_forward -> kernel, on call.AttentionCall."""
