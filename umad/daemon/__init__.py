"""The shell around core: loop, socket, effects."""
