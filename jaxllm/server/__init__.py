"""`jaxllm serve`: an HTTP server with OpenAI's interface.

Two processes: one handles HTTP and never imports JAX; the other has the model (`model_process`).
They exchange frames over a socket, so a model that crashes ends its requests, not the server.

frames: messages between the processes. model_process: the model's side. model_client: the HTTP
side. openai_requests, openai_responses, tools: OpenAI's JSON, both ways. harmony, gemma4:
answers in channels. app: the routes, with backend (what they share), generation_routes,
vector_routes and streams. limits: keys, sizes and times. metrics: Prometheus. listen: sockets,
signals, the end.
"""
