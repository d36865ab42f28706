"""An agent that plays a guessing game. It uses only the OpenAI client, and is trained without changes.

    python examples/server_agent/guess_agent.py     # plays against a server: OPENAI_BASE_URL, OPENAI_API_KEY

In training, `run` is called once per sample, each time with another base URL:

    actor_rollout_ref.rollout.mode=server
    actor_rollout_ref.rollout.server.agent.path=examples/server_agent/guess_agent.py
"""

import openai

GUESSES = 3

#: one client for all samples: they share its connections, and creating a client takes 0.1 s
CLIENT = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="set by run()", max_retries=0)


def run(sample: dict, base_url: str, api_key: str, model: str) -> float:
    """Play one game. Returns 1 if the number was found."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    return play(client, model, secret=int(sample["reward_model"]["ground_truth"]))


def play(client: openai.OpenAI, model: str, secret: int, show: bool = False) -> float:
    messages = [{"role": "user", "content": "Guess a number from 1 to 7."}]
    for _ in range(GUESSES):
        completion = client.chat.completions.create(model=model, messages=messages)
        guess = completion.choices[0].message.content.strip()
        if guess == str(secret):
            return 1.0
        messages.append({"role": "assistant", "content": guess})
        messages.append({"role": "user", "content": hint(guess, secret)})
        if show:
            print(guess, "->", messages[-1]["content"])
    return 0.0


def hint(guess: str, secret: int) -> str:
    if not guess.isdigit():
        return "not a number"
    return "higher" if int(guess) < secret else "lower"


if __name__ == "__main__":
    from random import randint

    client = openai.OpenAI()
    model = client.models.list().data[0].id
    print("found" if play(client, model, secret=randint(1, 7), show=True) else "not found")
