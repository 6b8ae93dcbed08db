"""The web page of `phalanx run --page`: the job as it runs, served by the launcher on loopback."""
