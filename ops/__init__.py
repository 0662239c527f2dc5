"""ops: the ground floor. Knows nobody; everyone may report to it.

Eyes: metrics (the one table), histogram (plain numbers), exposition (the only file that knows a metrics library),
dashboard and grafana (forebay-dashboard.json, made from the table).
Load: trace (Mooncake JSONL), turns (order inside sessions), prompt_text (text for block ids), openai_stream (one
request as a client sees it), replay, replay_report, replay_cli.
Figures: bench_report (the one form of every measurement).
"""
