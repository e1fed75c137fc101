"""python -m jaxenc: the same as the program `jaxenc`."""

from jaxenc.cli import main

if __name__ == "__main__":
    main()
