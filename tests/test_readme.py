"""What the README shows is what the commands that it names print."""

from benchmarks import readme


def test_the_table_of_encoders_is_what_its_command_writes():
    _, _, rest = readme.README.read_text().partition(readme.BEGIN)
    shown, end, _ = rest.partition(readme.END)
    assert end
    assert rest.count(readme.BEGIN) == 0, "there is a second one"
    assert shown == readme.table()
