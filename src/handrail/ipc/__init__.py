"""How do several processes share one kernel? One holds the workspace; the others join it over a local socket."""
