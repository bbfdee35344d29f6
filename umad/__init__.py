"""umad: memory as a contract for machines whose CPU and GPU share one DRAM."""

__version__ = "0.1.0"
