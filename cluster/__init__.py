"""cluster: makes plain classes remote, launches them, and is the command line. The only room that imports ray.

In reading order: `cli` and `config` (what is asked for), `launch` with `rundir` and `supervise` (start and end),
`actors` and `serve_workers` (Ray's side), `replicas` around `step_loop` (a worker's side: calls, streams, beats), and
the ingress: `ingress`, `registry` (who lives), `admission` and `dispatch` (who goes where), `jobs` and `attempt` (one
job's way through it all), `streams` and `serve_calls` (how it reaches workers), `ingress_http` (its door).
"""
