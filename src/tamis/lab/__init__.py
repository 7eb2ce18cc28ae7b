"""Programs around the library: checks, benchmarks, inspection, demonstrations. The library never imports them."""
