"""What few people need, kept out of the way of the rest: nothing outside imports this package.

needle: a fact in a long text, and the command `jaxllm recall`.
plan: estimates of memory, communication and time on a mesh, and the command `jaxllm plan`.
llama_batch: batches of tokens in the style of llama.cpp's `llama_decode`.

A command joins the command line by an entry point of the group `jaxllm.commands`, as one of another
package would.
"""
