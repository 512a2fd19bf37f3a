"""Parts of `hostile_requests`: a raw HTTP client, and what it sends."""
