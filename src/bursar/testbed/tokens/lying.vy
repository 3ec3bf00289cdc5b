# pragma version 0.4.3
"""
@notice Moves one unit and reports the whole amount twice over.
"""

event Transfer:
    sender: indexed(address)
    receiver: indexed(address)
    amount: uint256

balanceOf: public(HashMap[address, uint256])


@deploy
def __init__(supply: uint256):
    self.balanceOf[msg.sender] = supply


@external
def transfer(to: address, amount: uint256) -> bool:
    self.balanceOf[msg.sender] -= 1
    self.balanceOf[to] += 1
    log Transfer(sender=msg.sender, receiver=to, amount=2 * amount)
    return True
