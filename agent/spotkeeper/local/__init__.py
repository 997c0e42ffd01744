"""The one-machine cloud: Compute Engine, metadata servers, a bucket and VMs on a laptop.

Everything a user's first minute exercises is production code; only the cloud is a stand-in, and this
package is that stand-in. It answers 501 rather than guess. Nothing outside it may import it but the
command line, the demo and the tests.
"""
