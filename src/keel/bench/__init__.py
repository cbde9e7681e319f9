"""What `keel bench` runs: the programs of benchmarks/, found and started, their rows gathered."""
