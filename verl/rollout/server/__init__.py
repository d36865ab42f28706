"""An OpenAI-compatible HTTP server over a rollout engine: `verl serve`, and training of external agents.

    protocol      the parameters of a call, and errors in OpenAI's form
    service       calls to engine requests, completions to choices
    responses     choices to response bodies and stream chunks
    app           routes, authentication, limits, disconnects
    engine_loop   the engine in its own thread
    http          the server in the foreground or in a thread
"""
