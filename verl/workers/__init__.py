"""Workers combine a training engine, a rollout engine and the algorithms into methods that the controller calls."""
