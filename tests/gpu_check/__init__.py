"""``make gpu-check``: models on a GPU of this machine, compared with the CPU; see ``__main__``."""
