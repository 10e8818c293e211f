"""An OpenAI-compatible HTTP server around one engine thread.

A request comes in through `app` (routes, `auth`, `errors`), is checked in `requests/`, goes
to the engine through `engine_thread/`, and leaves in the shapes of `replies/`; `tools/` are the
formats of tool calls. `listen` is the process: its socket, and how it ends.
"""
