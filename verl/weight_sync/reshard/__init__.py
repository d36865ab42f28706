"""Weight sync between different shardings: each rank receives the chunks of the parameters that it lacks."""
