"""A job as seen from outside: who waits for whom, where, how long, since when.

`slates` reads the ranks' slates, `joining` compares their operations, `watch` adds them up to a `Picture`, and
`findings` says what is wrong. Whatever shows a job (`phalanx top`, the page, the trace, the metrics, the last line)
shows a `Picture`.
"""
