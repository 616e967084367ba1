"""`python -m cure_ray` is `cure-ray`."""

from cure_ray.cli import main

if __name__ == "__main__":
    main()
