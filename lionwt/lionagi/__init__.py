"""What lives inside lionagi.

`turns` makes its conversations turn-safe (ADR-0018), `workers` gives each worker a lease (ADR-0091).

Nothing is imported here, and lionagi itself only when an adapter is installed.
"""
