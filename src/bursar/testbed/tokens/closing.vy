# pragma version 0.4.3
"""
@notice Can be closed by anyone: from then on every transfer reverts.
"""

event Transfer:
    sender: indexed(address)
    receiver: indexed(address)
    amount: uint256

balanceOf: public(HashMap[address, uint256])
closed: public(bool)


@deploy
def __init__(supply: uint256):
    self.balanceOf[msg.sender] = supply


@external
def close():
    self.closed = True


@external
def transfer(to: address, amount: uint256) -> bool:
    assert not self.closed, "the token is closed"
    self.balanceOf[msg.sender] -= amount
    self.balanceOf[to] += amount
    log Transfer(sender=msg.sender, receiver=to, amount=amount)
    return True
