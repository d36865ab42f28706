"""Training engines: one model, its optimizer, its checkpoints."""
