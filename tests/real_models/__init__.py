"""Model files that ship inside Python packages, served without configuration."""
