"""Log-probs of the actor's processes take 0.3 s more: given as `imports`, so that what runs beside them shows."""

import os
import time

from verl.workers.policy import ActorWorker

if "RANK" in os.environ:  # not in the controller, which imports it too
    prompt = ActorWorker.compute_log_prob

    def late(self, batch):
        time.sleep(0.3)
        return prompt(self, batch)

    late.__dict__.update(vars(prompt))
    ActorWorker.compute_log_prob = late
