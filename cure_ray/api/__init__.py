"""The library behind `import cure_ray` and the command line: typed requests in, results out. One module per verb."""
