"""Ways to compute `local_attention`; `ops.local_attention` chooses by capability and size."""
