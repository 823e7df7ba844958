"""How do several processes share one kernel? One holds the workspace; the others connect to it over a local socket."""
