"""The HTTP API: routes, who may call them, what is refused and how. Needs the extra `bursar[api]`.

Two ways in: `api.app` makes the application, and `api.tokens` makes and checks tokens. They are apart because a program
that only wants a token (`bursar token`, the demo, the load of a benchmark) would wait for a web framework to load.
"""
