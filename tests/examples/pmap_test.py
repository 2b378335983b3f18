"""The pmap example runs, and all its devices agree."""

from examples import pmap_layer


def test_all_devices_agree(capsys):
    pmap_layer.main()
    assert capsys.readouterr().out.count("bit for bit: True") == 2
