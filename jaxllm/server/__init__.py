"""`jaxllm serve`: an HTTP server with OpenAI's and Anthropic's interfaces.

Two processes: one handles HTTP and never imports JAX; the other has the model (`model_process`).
They exchange frames over a socket, so a model that crashes ends its requests, not the server.

frames: messages between the processes. model_process: the model's side. model_client: the HTTP
side. openai_requests, openai_responses: OpenAI's JSON, both ways; responses_api, messages_api:
requests read as chats, and their answers. text_reader, tools, harmony, gemma4: an answer's thoughts
and calls. app: the routes, with backend (what they share), generation_routes,
vector_routes and streams. limits: keys, sizes and times. metrics: Prometheus. listen: sockets,
signals, the end.
"""
