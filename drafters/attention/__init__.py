"""Attention of training over long rows: which keys a query sees, and kernels that keep little."""
