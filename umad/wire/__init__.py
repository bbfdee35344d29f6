"""The control protocol, without input or output."""
