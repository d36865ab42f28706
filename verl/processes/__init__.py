"""Child processes: how they start, exchange messages and end. Nothing here knows what runs in them."""
