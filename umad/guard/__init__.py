"""The native shim in umad-serve, its page layout and its loader."""
