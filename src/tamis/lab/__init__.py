"""Programs that look at the library: checks, benchmarks, inspection, demonstrations. It never imports them."""
