#!/bin/bash
# The first process of the guest: a kernel NFS server with two clients of its own, as if these were three machines.
# Takes from the kernel's command line: nfs_version=, and nfs_command= a file with the command to run.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/mnt PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs -o size=1400m scratch /mnt # all else of the host is read-only
export TMPDIR=/mnt
mount -t tmpfs run /run
mount -t tmpfs shm /dev/shm 2>/dev/null
from_command_line() { sed -n "s/.*$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
version=$(from_command_line nfs_version)
command=$(from_command_line nfs_command)

mkdir -p /mnt/modules/lib
ln -s /usr/lib/uml/modules /mnt/modules/lib/modules
for module in nfsd nfsv4 nfsv3; do modprobe -d /mnt/modules "$module" 2>/dev/null; done
ip link set lo up
mount -t tmpfs state /var/lib/nfs
mkdir -p /var/lib/nfs/{rpc_pipefs,v4recovery,sm,sm.bak,nfsdcltrack,nfsdcld}
touch /var/lib/nfs/{etab,rmtab,state}
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs rpc /var/lib/nfs/rpc_pipefs 2>/dev/null
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 10 >/proc/fs/nfsd/nfsv4gracetime

mkdir -p /mnt/export /mnt/first /mnt/second /mnt/full
mount -t tmpfs -o size=700m export /mnt/export
mkdir /mnt/export/small
mount -t tmpfs -o size=16m small /mnt/export/small
rpcbind -w 2>/dev/null || rpcbind # without it rpc.nfsd fails, also for version 4
options=rw,no_root_squash,insecure,sync,no_subtree_check
exportfs -o $options,fsid=0 127.0.0.0/8:/mnt/export
exportfs -o $options,fsid=2 127.0.0.0/8:/mnt/export/small
rpc.mountd
rpc.nfsd 4
echo Y >/proc/fs/nfsd/v4_end_grace 2>/dev/null

# nosharecache: each mount has a cache of its own, like a machine of its own.
mount_options=vers=$version,nosharecache
root=
[ "$version" = 3 ] && mount_options=$mount_options,nolock && root=/mnt/export
for client in first second; do mount -t nfs -o $mount_options "127.0.0.1:${root:-/}" /mnt/$client; done
mount -t nfs -o $mount_options "127.0.0.1:$root/small" /mnt/full
grep -c ' nfs' /proc/mounts
bash "$command"
echo "ended with $?"
sync
echo o >/proc/sysrq-trigger
sleep 5
