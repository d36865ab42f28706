"""An OpenAI-compatible HTTP server over a rollout engine: `verl serve`, and training of external agents.

protocol      the parameters of a call, and errors in OpenAI's form
service       calls to engine requests, completions to choices; responses as text, token by token; tool calls
app           response bodies and stream chunks, routes, authentication, limits, disconnects
http          the server in the foreground or in a thread
agents        agents that are trained
episodes      the calls of one agent, joined into a trajectory
agent_loop    the agent loop `server_agent`
"""
